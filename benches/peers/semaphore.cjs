// Runs the semaphores of redis-semaphore, and prints what each client did, or what a killed one has left.
//
//     node semaphore.cjs VARIANT URL CLIENTS HOLD PAUSE LENGTH     as redlock.cjs
//     node semaphore.cjs VARIANT URL killed TTL SECONDS            as python_locks.py
//
// All clients are in one process, each with a connection of its own; times are in seconds. It asks again every 10 ms
// unless it is told otherwise; VARIANT is `default`.

const { fork } = require("node:child_process");
const { once } = require("node:events");
const { Semaphore } = require("redis-semaphore");
const Redis = require("ioredis");

const PLACES = 4;
const LONG = 3600000;

const [, url, ...words] = process.argv.slice(2);
const sleep = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
const place = (redis, ttl = 30) => new Semaphore(redis, "lock", PLACES, { acquireTimeout: LONG, lockTimeout: 1000 * ttl });

let start;
const now = () => performance.now() / 1000 - start;
const print = (value) => process.stdout.write(JSON.stringify(value), () => process.exit(0));

async function client(redis, log, hold, pause) {
  const semaphore = place(redis);
  for (;;) {
    const asked = now();
    log.waiting_since = asked;
    await semaphore.acquire();
    const granted = now();
    log.waiting_since = null;
    await sleep(hold);
    const releasing = now();
    await semaphore.release();
    log.turns.push([asked, granted, releasing]);
    if (pause) await sleep(Math.random() * pause);
  }
}

async function turns(clients, hold, pause, length) {
  const connections = Array.from({ length: clients }, () => new Redis(url));
  await Promise.all(connections.map((redis) => redis.ping()));
  start = performance.now() / 1000;
  const logs = connections.map(() => ({ turns: [], waiting_since: null }));
  connections.forEach((redis, number) => client(redis, logs[number], hold, pause));
  await sleep(length);
  for (const log of logs) log.turns = log.turns.filter((turn) => turn[2] < length);
  print(logs);
}

async function hold(ttl) {
  for (let number = 0; number < PLACES; number++) await place(new Redis(url), ttl).acquire();
  process.send("held");
  await sleep(LONG);
}

async function killed(ttl, seconds) {
  const holder = fork(__filename, ["default", url, "hold", ttl]);
  await once(holder, "message");
  holder.kill("SIGKILL");
  await once(holder, "exit");
  start = performance.now() / 1000;
  const took = [];
  for (let number = 0; number < PLACES; number++) {
    place(new Redis(url))
      .acquire()
      .then(() => took.push(now()));
  }
  await sleep(seconds);
  print({ free: took.length, last: took.length ? Math.max(...took) : null });
}

const mode = { hold, killed }[words[0]];
if (mode) mode(...words.slice(1).map(Number));
else turns(...words.map(Number));
