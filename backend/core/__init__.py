"""The core: the Controller and its parts, where the books and the hardware meet."""
