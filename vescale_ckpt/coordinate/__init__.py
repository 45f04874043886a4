"""The few small collectives of a save and a load, on the main thread only, with a one-process twin."""
