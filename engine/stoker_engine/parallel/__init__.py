"""The device, communication between the ranks of an engine, and transfers between host and device."""
