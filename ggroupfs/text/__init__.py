"""The text that files and commands share: values, names, properties and explanations of refusals. Pure."""
