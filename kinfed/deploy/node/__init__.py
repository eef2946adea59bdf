"""A node: its owner's policy, its data, its vault and privacy log, what it does when the server asks."""
