// Writes tensors as bytes, reads and writes base64, and prints bytes as a hex dump.

/**
 * The typed array of each datatype. All machines with a browser are little-endian, as tensors are.
 * FP16 and BF16 have none, so their bits are computed.
 */
const ARRAYS = {
  UINT8: Uint8Array,
  UINT16: Uint16Array,
  UINT32: Uint32Array,
  UINT64: BigUint64Array,
  INT8: Int8Array,
  INT16: Int16Array,
  INT32: Int32Array,
  INT64: BigInt64Array,
  FP16: Uint16Array,
  BF16: Uint16Array,
  FP32: Float32Array,
  FP64: Float64Array,
};

const BITS_OF = { FP16: halfBits, BF16: bfloatBits };

export const NUMERIC_DATATYPES = Object.keys(ARRAYS);

const FLOAT = new Float32Array(1);
const BITS = new Uint32Array(FLOAT.buffer);

export function isFloat(datatype) {
  return /^B?F/.test(datatype);
}

/** Return the size of an element in bytes. */
export function elementSize(datatype) {
  return ARRAYS[datatype].BYTES_PER_ELEMENT;
}

/** Write numbers as a tensor; integers of 64 bits may be texts or BigInts. */
export function tensorBytes(values, datatype) {
  const array = new ARRAYS[datatype](values.length);
  const bitsOf = BITS_OF[datatype];
  if (bitsOf) values.forEach((value, index) => (array[index] = bitsOf(value)));
  else if (datatype.endsWith("INT64")) {
    values.forEach((value, index) => (array[index] = wholeNumber(value)));
  } else array.set(isFloat(datatype) ? values : values.map(Math.round));
  return new Uint8Array(array.buffer);
}

function wholeNumber(value) {
  return BigInt(typeof value === "number" ? Math.round(value) : value);
}

/** Return the bits of a number as FP16, rounded to the nearest, of two to the even one. */
export function halfBits(value) {
  FLOAT[0] = value;
  const [bits] = BITS;
  const sign = (bits >>> 16) & 0x8000;
  const size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00; // NaN
  if (size >= 0x477ff000) return sign | 0x7c00; // from 65,520 on, the nearest is infinity
  if (size < 0x38800000) return sign | roundedToEven(Math.abs(FLOAT[0]) * 2 ** 24); // subnormal
  return sign | ((size - 0x38000000 + 0xfff + ((size >>> 13) & 1)) >>> 13);
}

/** Return the bits of a number as BF16, rounded in the same way. */
export function bfloatBits(value) {
  FLOAT[0] = value;
  const [bits] = BITS;
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >>> 16) | 0x40; // NaN
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function roundedToEven(value) {
  const below = Math.floor(value);
  const rest = value - below;
  return below + (rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? 1 : 0);
}

const CHUNK = 0x8000; // arguments of one function

export function toBase64(bytes) {
  const parts = [];
  for (let at = 0; at < bytes.length; at += CHUNK) {
    // Spread arguments would be iterated one by one, which takes several times as long.
    parts.push(String.fromCharCode.apply(null, bytes.subarray(at, at + CHUNK)));
  }
  return btoa(parts.join(""));
}

export function fromBase64(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = characters.charCodeAt(at);
  return bytes;
}

const ROW = 16;

/** Print bytes in rows of 16: the offset, the bytes, and those that are ASCII as text. */
export function hexDump(bytes) {
  const rows = [];
  for (let at = 0; at < bytes.length; at += ROW) {
    const row = [...bytes.subarray(at, at + ROW)];
    const hex = row.map((byte) => byte.toString(16).padStart(2, "0"));
    const left = hex.slice(0, ROW / 2).join(" ");
    const codes = `${left}  ${hex.slice(ROW / 2).join(" ")}`.padEnd(3 * ROW);
    const text = row.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : "."));
    rows.push(`${at.toString(16).padStart(8, "0")}  ${codes}  |${text.join("")}|`);
  }
  return rows.join("\n");
}
