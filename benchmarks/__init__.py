"""What the gateway costs and gains, measured on the machine at hand: ``make bench``."""
