"""Pools of endpoints: leases, health, ejection, DNS, models, dialect."""
