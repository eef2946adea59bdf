"""The operator's tools: app folders, certificates, site kits, starting nodes and servers, trials."""
