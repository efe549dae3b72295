"""Make the tables of all pages anew."""

import argparse

from benchmarks.doc_tables import PAGES, remade

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for page in PAGES:
        text = page.read_text()
        if (again := remade(text)) != text:
            page.write_text(again)
            print(page)
