"""Route matching, load balancing, endpoint health and retry budgets, without I/O."""
