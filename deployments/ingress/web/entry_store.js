// Entries that this browser keeps in its IndexedDB: images, conversations. In memory where it has no room for them.

const NAME = "atelier";
const VERSION = 2;
const STORES = ["images", "conversations"];

export class EntryStore {
  constructor(name) {
    this.name = name; // one of STORES
    this.unkept = new Map(); // what the browser would not keep, by key
    this.database = this.opened().catch(() => null);
  }

  opened() {
    return new Promise((resolve, reject) => {
      const asking = indexedDB.open(NAME, VERSION);
      asking.onupgradeneeded = () => {
        const missing = STORES.filter((name) => !asking.result.objectStoreNames.contains(name));
        for (const name of missing) asking.result.createObjectStore(name, { keyPath: "key" }).createIndex("at", "at");
      };
      asking.onsuccess = () => {
        asking.result.onversionchange = () => asking.result.close(); // a newer page in another tab waits for that
        resolve(asking.result);
      };
      asking.onerror = asking.onblocked = () => reject(asking.error);
    });
  }

  async within(mode, work) {
    const database = await this.database;
    if (!database) throw new Error("no database");
    return new Promise((resolve, reject) => {
      const transaction = database.transaction(this.name, mode, { durability: "relaxed" });
      let result;
      transaction.oncomplete = () => resolve(result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error("aborted"));
      const asking = work(transaction.objectStore(this.name));
      if (asking) asking.onsuccess = () => (result = asking.result);
      transaction.commit(); // at once: what a page asks for while it is left is done all the same
    });
  }

  // Keep an entry {key, at, …}; `at` is when it was made or changed. Returns whether the browser will still have it tomorrow.
  async put(entry) {
    try {
      await this.within("readwrite", (store) => store.put(entry));
      return true;
    } catch {
      this.unkept.set(entry.key, entry);
      return false;
    }
  }

  // Return all entries, the newest first.
  async all() {
    const found = await this.within("readonly", (store) => store.index("at").getAll()).catch(() => []);
    return [...found, ...this.unkept.values()].sort((one, other) => other.at - one.at);
  }

  async remove(key) {
    this.unkept.delete(key);
    await this.within("readwrite", (store) => void store.delete(key)).catch(() => {});
  }

  async clear() {
    this.unkept.clear();
    await this.within("readwrite", (store) => void store.clear()).catch(() => {});
  }
}
