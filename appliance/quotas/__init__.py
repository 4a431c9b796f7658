"""Token quotas and the one ledger of what was generated."""
