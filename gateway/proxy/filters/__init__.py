"""What is done to every call on the way: authentication, headers, compression, mirroring."""
