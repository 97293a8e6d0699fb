"""Authentication, forwarded headers, compression, decompression and mirroring of calls."""
