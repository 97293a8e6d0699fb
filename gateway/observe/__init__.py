"""What operators see of the gateway at work."""
