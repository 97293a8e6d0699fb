// Sends requests by the http2 of Node, on a connection each: node client.js URL CA SIZE ROUNDS
const fs = require("node:fs");
const http2 = require("node:http2");
const { Readable } = require("node:stream");

const PIECE = 64 * 1024;

const [url, ca, size, rounds] = process.argv.slice(2);
const { origin, pathname } = new URL(url);

function* pieces(body) {
  for (let start = 0; start < body.length; start += PIECE) {
    yield body.subarray(start, start + PIECE);
  }
}

function send(body) {
  return new Promise((resolve) => {
    const session = http2.connect(origin, { ca: fs.readFileSync(ca) });
    const end = (status, text) => {
      session.close();
      resolve([status, text]);
    };
    session.on("error", (error) => end(0, String(error)));
    const stream = session.request({
      ":method": "POST",
      ":path": pathname,
      "content-length": body.length,
    });
    let status = 0;
    let text = "";
    stream.setEncoding("utf8");
    stream.setTimeout(20000, () => end(0, "nothing came for 20 s"));
    stream.on("response", (headers) => (status = headers[":status"]));
    stream.on("data", (data) => (text += data));
    stream.on("end", () => end(status, text));
    stream.on("error", (error) => end(0, String(error)));
    // In pieces: with more than 10 MB in one buffer, Node refuses any response (maxSessionMemory).
    Readable.from(pieces(body)).pipe(stream);
  });
}

async function main() {
  const body = Buffer.alloc(Number(size));
  for (let round = 0; round < Number(rounds); round++) {
    console.log(JSON.stringify(await send(body)));
  }
}

main();
