"""The Open Inference Protocol: operations, datatypes, headers, dialects; no I/O."""
