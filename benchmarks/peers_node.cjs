// The peers that run on Node.js: `node peers_node.cjs fill|work pg-boss|graphile-worker|bullmq URL SETTINGS`.
// They do what benchmarks/handled_worker.py describes: NODE_PATH names the folder that they are installed in.
"use strict";
const fs = require("node:fs");

const BATCH = 1000;
const [action, peer, connectionString, json] = process.argv.slice(2);
const settings = JSON.parse(json);
const due = settings.due === null ? undefined : new Date(settings.due * 1000);

function* bodies() {
  for (let first = 0; first < settings.number; first += BATCH) {
    const batch = [];
    for (let number = first; number < Math.min(settings.number, first + BATCH); number++) {
      batch.push(String(number).padStart(6, "0") + "b".repeat(250));
    }
    yield batch;
  }
}

function records() {
  const file = fs.openSync(process.env.BENCHMARK_HANDLED, "a");
  return (body) => {
    const microseconds = Math.floor((performance.timeOrigin + performance.now()) * 1000) % 1e10;
    fs.writeSync(file, body.slice(0, 6) + String(microseconds).padStart(10, "0"));
  };
}

const peers = {
  "pg-boss": {
    async fill() {
      const boss = await start();
      await boss.createQueue("work");
      for (const batch of bodies()) {
        await boss.insert(batch.map((body) => ({ name: "work", data: { body }, startAfter: due })));
      }
      await boss.stop();
    },
    async work() {
      const boss = await start();
      const write = records();
      const options = { batchSize: settings.batch, pollingIntervalSeconds: 0.5 };
      for (let worker = 0; worker < settings.workers; worker++) {
        await boss.work("work", options, async (jobs) => {
          for (const job of jobs) write(job.data.body);
        });
      }
    },
  },
  "graphile-worker": {
    async fill() {
      const { makeWorkerUtils } = require("graphile-worker");
      const utils = await makeWorkerUtils({ connectionString });
      await utils.migrate();
      for (const batch of bodies()) {
        await utils.addJobs(batch.map((body) => ({ identifier: "work", payload: { body }, runAt: due })));
      }
      await utils.release();
    },
    async work() {
      const { Logger, run } = require("graphile-worker");
      const write = records();
      const { localQueue, concurrentJobs } = settings;
      const worker = {
        connectionString,
        concurrentJobs,
        pollInterval: 100,
        localQueue: { size: localQueue },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
        logger: new Logger(() => () => {}),
      };
      await run({ preset: { worker }, taskList: { work: async (payload) => write(payload.body) } });
    },
  },
  bullmq: {
    async fill() {
      const { Queue } = require("bullmq");
      const queue = new Queue("work", { connection: redis() });
      for (const batch of bodies()) {
        const delay = due === undefined ? 0 : Math.max(0, due.getTime() - Date.now());
        const opts = { delay, removeOnComplete: true };
        await queue.addBulk(batch.map((body) => ({ name: "work", data: { body }, opts })));
      }
      await queue.close();
    },
    async work() {
      const { Worker } = require("bullmq");
      const write = records();
      const options = { connection: redis(), concurrency: settings.concurrency };
      const worker = new Worker("work", async (job) => write(job.data.body), options);
      worker.on("error", (error) => console.error(error));
      await worker.waitUntilReady();
    },
  },
};

function redis() {
  const { hostname, port } = new URL(connectionString);
  return { host: hostname, port: Number(port), maxRetriesPerRequest: null };
}

async function start() {
  const PgBoss = require("pg-boss");
  const boss = new PgBoss({ connectionString });
  boss.on("error", (error) => console.error(error));
  await boss.start();
  return boss;
}

peers[peer][action]().then(
  () => console.log(action === "work" ? "ready" : "done"),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
