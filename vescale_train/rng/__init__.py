"""Random numbers of one device on any layout of tensors, behind one switch: initialisation, dropout and ``rand*``."""

from vescale_train.rng.switch import SingleDeviceRandom, active, initialize, single_device_rng

__all__ = ["SingleDeviceRandom", "active", "initialize", "single_device_rng"]
