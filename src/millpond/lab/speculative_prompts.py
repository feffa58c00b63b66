"""Questions for measuring speculative decoding: answers that repeat their prompt, and answers that do not."""

STORY = (
    "Nine hundred ships lay in the harbour of Port Merrow on the morning of the fire. The harbour master, Anna Reval, "
    "had counted them the night before, as she did every night, and had written the number into her book. At four in "
    "the morning a barrel of lamp oil fell from the deck of the Swallow and rolled along the quay. At five the "
    "warehouses of the Linden Company were burning. By noon the wind had turned to the west, and the fire reached the "
    "rope works of Thomas Hale. The mayor, Edwin Moss, ordered the bridges to be opened so that the ships could leave. "
    "Six hundred and twelve of them did. Anna Reval wrote the new number into her book the same evening."
)

CODE = """```python
class Stack:
    def __init__(self, capacity):
        self.capacity = capacity
        self.items = []

    def push(self, item):
        if len(self.items) == self.capacity:
            raise OverflowError("the stack is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()
```"""

TABLE = """name,city,born
Anna Reval,Port Merrow,1811
Thomas Hale,Calder,1799
Edwin Moss,Port Merrow,1787
Martha Quill,Linden,1820
Peter Osk,Calder,1833"""

PROMPTS: dict[str, tuple[str, ...]] = {
    "repetitive": (
        f"Repeat this text word by word:\n\n{STORY}",
        f"Rewrite this Python class. Rename `items` to `values` and change nothing else.\n\n{CODE}",
        f"Turn this CSV into a JSON list of objects:\n\n{TABLE}",
        f"{STORY}\n\nCopy every sentence of this text that names a person.",
    ),
    "ordinary": (
        "Explain how a refrigerator works.",
        "Write a short story about a lighthouse keeper.",
        "What are the advantages of learning a second language?",
        "Write a letter to a friend about a trip to the mountains.",
    ),
}
