"""Items that change while a server runs: every worker follows a journal that lies beside the export."""
