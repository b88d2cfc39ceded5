/** A bounded queue of messages. All iterators share it: each message is read once. */
export class Inbox<T> {
  readonly #messages: T[] = [];
  readonly #readers: Reader<T>[] = [];
  readonly #room: number;
  #end: { error: Error | undefined } | undefined;

  constructor(room: number) {
    this.#room = room;
  }

  /** Adds a message; false if there is no room. */
  push(message: T): boolean {
    const reader = this.#readers.shift();
    if (reader !== undefined) {
      reader.resolve({ value: message, done: false });
      return true;
    }
    if (this.#messages.length >= this.#room) {
      return false;
    }
    this.#messages.push(message);
    return true;
  }

  /** Nothing more will come. Readers get the remaining messages, then the error or the end. */
  end(error: Error | undefined): void {
    this.#end ??= { error };
    for (const reader of this.#readers.splice(0)) {
      this.#finish(reader, this.#end);
    }
  }

  read(): Promise<IteratorResult<T, undefined>> {
    return new Promise((resolve, reject) => {
      const reader = { resolve, reject };
      if (this.#messages.length > 0) {
        resolve({ value: this.#messages.shift() as T, done: false });
      } else if (this.#end !== undefined) {
        this.#finish(reader, this.#end);
      } else {
        this.#readers.push(reader);
      }
    });
  }

  #finish(reader: Reader<T>, end: { error: Error | undefined }): void {
    if (end.error !== undefined) {
      reader.reject(end.error);
    } else {
      reader.resolve({ value: undefined, done: true });
    }
  }
}

interface Reader<T> {
  resolve(result: IteratorResult<T, undefined>): void;
  reject(error: Error): void;
}
