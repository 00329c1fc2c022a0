"""Spikes of the loss: found (`detector`), followed (`tracker`) and explained (`diagnosis`)."""
