"""The one door for bytes: every message between ranks passes here, is counted, and can be faked, delayed or broken."""
