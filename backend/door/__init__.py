"""The socket of a tree: the messages, the peer at the other end, and what a program asks before it connects."""
