"""What an operator does: app folders, certificates, site kits, starting nodes and servers, trials."""
