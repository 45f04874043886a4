"""A content-addressed checkpoint store for PyTorch: save from any parallel layout, load into any other."""
