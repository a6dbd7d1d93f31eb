# Token ids out of a JSON text, without an integer of Python for each. It is beside the compiled core alone, and in C:
# mypyc has no buffer that compiled code may write to but librt's, which every install would need as a package.

# The ids of a part of a text, as prefix_labels.packed has them: ids with commas between them, without the brackets of
# their list. None where there is none, or anything else: a number that is no id, or is one in another form (1e2).
# ValueError if the part is not within the text.
def packed_digits(text: bytes, begin: int, end: int, /) -> bytes | None: ...
