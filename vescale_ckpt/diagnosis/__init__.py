"""Diagnosis: what the storage behind a store really does, and how the store in it is."""
