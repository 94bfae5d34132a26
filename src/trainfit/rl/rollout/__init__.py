"""Generation of many sequences at a time with the native decoder and a cache of keys and values."""
