"""Several servers asked as one."""
