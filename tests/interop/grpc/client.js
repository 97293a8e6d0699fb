// Makes the calls of calls.py by @grpc/grpc-js: node client.js ADDRESS FOLDER_OF_PROTO_FILES
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const PATIENCE = 20000;
const DEADLINE = 300;

const [address, folder] = process.argv.slice(2);
const definition = loader.loadSync("inference.proto", { includeDirs: [folder], keepCase: true });
const { inference } = grpc.loadPackageDefinition(definition);
const stub = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure());

const within = (milliseconds) => ({ deadline: Date.now() + milliseconds });

function request(model, values, id = "") {
  const contents = Buffer.from(new Float32Array(values).buffer);
  return {
    model_name: model,
    id,
    inputs: [{ name: "INPUT0", datatype: "FP32", shape: [values.length] }],
    raw_input_contents: [contents],
  };
}

function valuesOf(response) {
  const [contents] = response.raw_output_contents;
  return Array.from({ length: contents.length / 4 }, (_, i) => contents.readFloatLE(4 * i));
}

function infer(message, milliseconds, onHeaders = () => {}) {
  return new Promise((resolve) => {
    const call = stub.ModelInfer(message, within(milliseconds), (error, response) =>
      resolve({ error, response }),
    );
    call.on("metadata", () => onHeaders(call));
  });
}

function stream(messages) {
  return new Promise((resolve, reject) => {
    const call = stub.ModelStreamInfer(within(PATIENCE));
    const received = [];
    call.on("data", (message) => received.push(valuesOf(message.infer_response)));
    call.on("error", reject);
    call.on("end", () => resolve(received));
    messages.forEach((message) => call.write(message));
    call.end();
  });
}

async function main() {
  const { response } = await infer(request("identity", [0.5, -2]), PATIENCE);
  const { error } = await infer(request("missing", [1]), PATIENCE);
  const late = await infer(request("slow", [1], "deadline"), DEADLINE);
  const cancelled = await infer(request("slow", [1], "cancel"), PATIENCE, (call) => call.cancel());
  const report = {
    unary: valuesOf(response),
    stream: await stream([1, 2, 3].map((value) => request("identity", [value]))),
    error: [error.code, error.details, error.metadata.get("found-by")[0]],
    deadline: late.error.code,
    cancel: cancelled.error.code,
  };
  console.log(JSON.stringify(report));
  stub.close();
}

main();
