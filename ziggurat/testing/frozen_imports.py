"""Take what has been imported so far out of garbage collections, for good: importing this module does it.

A fork server imports this last. Its children share the memory of what it has loaded, 900,000 objects with torch, until
one of them writes to it, and a full garbage collection writes to the header of every object that it looks at: each
child then copied 180 MB page by page, and collected for 0.5 s of a processor, for modules that are never garbage.
Frozen objects are not looked at (`gc.freeze`, which is made for this).
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
