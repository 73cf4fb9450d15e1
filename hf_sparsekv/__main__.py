"""`python -m hf_sparsekv`, which launchers of several processes want: the command line."""

from hf_sparsekv.cli.app import main

if __name__ == "__main__":
    main()
