"""The endpoints of one upstream: leases, outliers, health, DNS, models."""
