"""The Open Inference Protocol as pure facts and functions, without I/O."""
