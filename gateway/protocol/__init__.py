"""What the Open Inference Protocol says: pure facts and functions, no I/O."""
