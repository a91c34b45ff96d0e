// The peers that run on Node.js: `node peers_node.cjs fill|send|work pg-boss|graphile-worker|bullmq URL SETTINGS`.
// They do what benchmarks/handled_worker.py describes: NODE_PATH names the folder that they are installed in.
"use strict";
const fs = require("node:fs");

const BATCH = 1000;
// As in benchmarks/handled_worker.py: digits of a message's number, and of a time in microseconds.
const NUMBER_DIGITS = 8;
const DIGITS = 12;
const FIRST = 10 ** NUMBER_DIGITS - 1;
const [action, peer, connectionString, json] = process.argv.slice(2);
const settings = JSON.parse(json);
const due = settings.due === null ? undefined : new Date(settings.due * 1000);

function* bodies() {
  for (let first = 0; first < settings.number; first += BATCH) {
    const batch = [];
    for (let number = first; number < Math.min(settings.number, first + BATCH); number++) {
      batch.push(bodyOf(number));
    }
    yield batch;
  }
}

function bodyOf(number) {
  return String(number).padStart(NUMBER_DIGITS, "0") + "b".repeat(256 - NUMBER_DIGITS);
}

function records(path = process.env.BENCHMARK_HANDLED) {
  const file = fs.openSync(path, "a");
  return (body, later = 0) => {
    const milliseconds = performance.timeOrigin + performance.now() + later;
    const microseconds = Math.floor(milliseconds * 1000) % 10 ** DIGITS;
    fs.writeSync(file, body.slice(0, NUMBER_DIGITS) + String(microseconds).padStart(DIGITS, "0"));
  };
}

// Sends so many messages a second, and records when each is due, as `steadily` in benchmarks/handled_worker.py.
async function steadily(send) {
  const write = records(process.env.BENCHMARK_SENT);
  await send(bodyOf(FIRST));
  console.log("ready");
  await new Promise((resolve) => process.stdin.once("data", resolve));
  const started = performance.now();
  const sending = new Set();
  for (let number = 0; number < settings.number; number++) {
    const pause = started + (number / settings.rate) * 1000 - performance.now();
    if (pause > 0) await new Promise((resolve) => setTimeout(resolve, pause));
    const body = bodyOf(number);
    write(body, (settings.delay || 0) * 1000);
    const job = send(body).finally(() => sending.delete(job));
    sending.add(job);
  }
  await Promise.all(sending);
  process.exit(0);
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
    async send() {
      const { makeWorkerUtils } = require("graphile-worker");
      const utils = await makeWorkerUtils({ connectionString });
      await steadily((body) => {
        const runAt = settings.delay ? new Date(Date.now() + settings.delay * 1000) : undefined;
        return utils.addJob("work", { body }, { runAt });
      });
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
