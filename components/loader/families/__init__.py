"""What a family's config.json has beyond the fields that all have, one page a family."""
