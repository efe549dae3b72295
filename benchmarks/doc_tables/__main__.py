"""Make the tables of all pages anew."""

from benchmarks.doc_tables import PAGES, remade

if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        if (again := remade(text)) != text:
            page.write_text(again)
            print(page.name)
