"""winnow inside serving engines, a package for each. docs/engines.md says how to use them."""
