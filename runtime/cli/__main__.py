"""`python -m runtime.cli` is `hgraph`; torchrun starts ranks this way."""

from runtime.cli import main

main()
