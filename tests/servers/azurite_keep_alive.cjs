// Azurite has Node's limit of 5 s for idle connections, and no option for it. An emulator that got no processor for
// longer then resets connections on which requests have just come, which Azure Storage does not do.
const { Server } = require("node:http");

const listen = Server.prototype.listen;
Server.prototype.listen = function (...place) {
  this.keepAliveTimeout = 600_000;
  return listen.apply(this, place);
};
