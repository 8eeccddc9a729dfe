/*
 * Search runs in a worker, which browsers refuse to pages that are opened from the disk (file:).
 * There, and only there, a worker is a hidden frame that runs the same script.
 */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.title = "search"
      document.documentElement.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write("<!doctype html><title>search</title>")
      inside.document.close()
      // What the script posts goes to the page; what it imports is loaded in turn.
      inside.postMessage = (data) => this.deliver(data)
      inside.importScripts = (...urls) => urls.reduce(
        (before, next) => before.then(() => this.load(next)), Promise.resolve()
      )
      this.ready = this.load(url)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        this.frame.contentDocument.body.append(script)
      })
    }

    deliver(data) {
      setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
    }

    postMessage(data) {
      this.ready.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
      )
    }

    terminate() {
      this.frame.remove()
    }
  }
}
