"""winnow inside serving engines, a module or package for each. docs/engines.md says how to use them."""
