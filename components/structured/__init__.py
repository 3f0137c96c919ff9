"""The engine's half of structured outputs: schemas and grammars to token masks."""
