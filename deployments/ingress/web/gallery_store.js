// The gallery: images with their parameters, in this browser's IndexedDB; in memory where it has no room for them.

const NAME = "atelier";
const STORE = "images";

export class GalleryStore {
  constructor() {
    this.unkept = new Map(); // what the browser would not keep, by key
    this.database = this.opened().catch(() => null);
  }

  opened() {
    return new Promise((resolve, reject) => {
      const asking = indexedDB.open(NAME, 1);
      asking.onupgradeneeded = () => asking.result.createObjectStore(STORE, { keyPath: "key" }).createIndex("at", "at");
      asking.onsuccess = () => resolve(asking.result);
      asking.onerror = asking.onblocked = () => reject(asking.error);
    });
  }

  async within(mode, work) {
    const database = await this.database;
    if (!database) throw new Error("no database");
    return new Promise((resolve, reject) => {
      const transaction = database.transaction(STORE, mode, { durability: "relaxed" });
      let result;
      transaction.oncomplete = () => resolve(result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error("aborted"));
      const asking = work(transaction.objectStore(STORE));
      if (asking) asking.onsuccess = () => (result = asking.result);
    });
  }

  // Keep an entry {key, at, file, …}. Returns whether the browser will still have it tomorrow.
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
