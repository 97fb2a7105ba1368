// Runs the locks of node-redlock, and prints what each client did.
//
//     node redlock.cjs default|10ms URL CLIENTS HOLD PAUSE LENGTH
//
// All clients are in one process, each with a connection of its own; times are in seconds.

const { default: Redlock } = require("redlock");
const Redis = require("ioredis");

const [variant, url, ...numbers] = process.argv.slice(2);
const [clients, hold, pause, length] = numbers.map(Number);
const settings = variant === "10ms" ? { retryCount: 1000, retryDelay: 10, retryJitter: 5 } : {};
const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

let start;
const now = () => performance.now() / 1000 - start;

async function client(redis, log) {
  const redlock = new Redlock([redis], settings);
  for (;;) {
    const asked = now();
    log.waiting_since = asked;
    let lock;
    // It gives up after its retries, and so asks for the whole to be repeated.
    while (!lock) lock = await redlock.acquire(["lock"], 30000).catch(() => undefined);
    const granted = now();
    log.waiting_since = null;
    await sleep(hold);
    const releasing = now();
    await lock.release();
    log.turns.push([asked, granted, releasing]);
    if (pause) await sleep(Math.random() * pause);
  }
}

(async () => {
  const connections = Array.from({ length: clients }, () => new Redis(url));
  await Promise.all(connections.map((redis) => redis.ping()));
  start = performance.now() / 1000;
  const logs = connections.map(() => ({ turns: [], waiting_since: null }));
  connections.forEach((redis, number) => client(redis, logs[number]));
  await sleep(length);
  for (const log of logs) log.turns = log.turns.filter((turn) => turn[2] < length);
  process.stdout.write(JSON.stringify(logs), () => process.exit(0));
})();
