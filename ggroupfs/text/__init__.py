"""The text that files and commands share: values, names, properties and the words of refusals. Pure."""
