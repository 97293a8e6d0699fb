"""Access to model servers: transports, pools of endpoints, cached metadata."""
