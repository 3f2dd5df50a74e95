"""One decision and one reason per patch: options, match, plan, requirements, locks."""
