"""zarr v3: groups read in place, and snapshots seen as groups."""
