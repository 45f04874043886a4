"""Collecting: what manifests refer to, told to the store's collection, and packs that are mostly dead rewritten."""
