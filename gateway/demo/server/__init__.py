"""An inference server over HTTP that follows Triton's behaviour."""
