"""Records and their codec: the bytes of manifests and fragments. Pure."""
